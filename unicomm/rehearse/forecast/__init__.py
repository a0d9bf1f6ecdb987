"""The forecast of a rehearsal: bytes, time and memory of the communication, for a topology.

topology.py         links and cores of a machine: presets, TOML files, measured times
cost_model.py       the time of one operation on a topology
timeline.py         all ranks' steps with these times: when each operation begins and ends
forecast.py         the figures: bytes, operations, time of a step, exposed and hidden communication
measure.py          measures operations for a topology file
forecast_text.py    the figures as text

Each file imports only files that stand above it.
"""
