"""Which dims of an op may be split over one mesh axis, and what each choice implies; one family a file."""
