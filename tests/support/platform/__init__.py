"""What stands for the platform: a cloud, stock images, Docker, hosts, and the jobs on them."""
