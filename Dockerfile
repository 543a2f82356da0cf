FROM python:3.13.18-slim-trixie

# mcp with all that it requires, every release pinned: --no-deps takes nothing that is not listed,
# pip check fails the build if something is missing. pip itself has no use afterwards.
RUN pip install --no-cache-dir --no-deps --only-binary=:all: --root-user-action=ignore \
        annotated-types==0.8.0 \
        anyio==4.16.0 \
        attrs==26.1.0 \
        cffi==2.1.1 \
        click==8.5.1 \
        cryptography==50.0.2 \
        h11==0.16.0 \
        httpcore2==2.16.2 \
        httpx2==2.16.2 \
        idna==3.20 \
        jsonschema==4.26.0 \
        jsonschema-specifications==2025.9.1 \
        mcp==2.3.0 \
        mcp-types==2.3.0 \
        opentelemetry-api==1.45.2 \
        pycparser==3.12 \
        pydantic==2.14.4 \
        pydantic-core==2.50.5 \
        pyjwt==2.15.1 \
        python-multipart==0.0.34 \
        referencing==0.37.0 \
        rpds-py==2026.9.1 \
        sse-starlette==3.7.0 \
        starlette==1.10.0 \
        truststore==0.10.5 \
        typing-extensions==4.16.0 \
        typing-inspection==0.4.5 \
        uvicorn==0.54.0 \
    && pip check \
    && pip uninstall --yes --root-user-action=ignore pip \
    && useradd --uid 10001 --user-group --no-create-home --no-log-init svacer

WORKDIR /app
COPY --chmod=0444 svacer_mcp.py ./

# The root file system may be read-only: nothing is written to it.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SVACER_TRANSPORT=http \
    SVACER_HTTP_HOST=0.0.0.0

USER 10001:10001
EXPOSE 8000

HEALTHCHECK --interval=30s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; port = int(os.environ.get('SVACER_HTTP_PORT') or 8000); c = http.client.HTTPConnection('127.0.0.1', port, timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

CMD ["python", "svacer_mcp.py"]
