"""A job that is asked to stop saves between two steps and ends well, and the next one goes on there."""
