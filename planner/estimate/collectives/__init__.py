"""How long a collective takes on given levels of links; one algorithm a file."""
