"""A rank's job: its place among the others, the session of ``smp.init()``, and data about the models it trains."""
