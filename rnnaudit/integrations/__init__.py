"""Audits where models are trained, tested and tracked; each needs its own package installed."""
