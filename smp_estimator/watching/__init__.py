"""All ranks of a job at a glance: what each spends its time on, and who holds the others up."""
