"""Several hosts: ssh between them, the host that leads, the hosts that follow."""
