"""What rings and dumps tell, as metrics for Prometheus and OpenTelemetry.

catalogue.py    the closed list of metrics: names, kinds, units, labels
totals.py       Totals: counters, summed over operations that have ended
samples.py      the samples of a table: counters, states and lateness of ranks, the verdict
openmetrics.py  samples as OpenMetrics text, or in the older format of Prometheus (prometheus-client)
otlp.py         samples as OTLP, as JSON or protobuf, and sent to a collector (opentelemetry-proto)
"""
