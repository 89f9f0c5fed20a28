"""What kinds of optimizers keep and need: those that are refused, and the state that each expects."""
