"""The parts of `make demo`: text, training of the arms, measurements, report. `tools/demo.py` puts them in order."""
