"""The watch over a job's ranks: notices that they hang, and finds out which rank and which line of the script it is."""
