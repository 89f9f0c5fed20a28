"""A rank's job: its place among the others, the session that ``smp.init()`` makes, and what is known of the models it trains."""
