"""Jobs in the cloud: the image they run in, how the runtime travels to it, and their logs."""
