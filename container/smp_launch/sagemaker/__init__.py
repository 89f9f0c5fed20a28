"""The platform: the folders of `/opt/ml`, the environment of a job, the training toolkit, SDK v3."""
