"""What happened, as figures and traces: hooks for Prometheus and OpenTelemetry over one table of series.

`semel.telemetry.prometheus` and `semel.telemetry.opentelemetry` are imported by name: each needs its own library.
"""
