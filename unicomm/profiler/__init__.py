"""Reserved by the design; see docs/design."""
