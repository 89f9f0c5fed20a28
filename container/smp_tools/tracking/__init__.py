"""Numbers of a training for the trackers that people have, and what ranks spend their time on."""
