"""Between ranks: the control plane, its object messages, process groups and the collectives seam."""
