"""``smp.nn``: modules that tensor parallel ranks share."""
