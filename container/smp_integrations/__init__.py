"""Integrations of other training libraries; each file is loaded only by a script that uses its library."""
