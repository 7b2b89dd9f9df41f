"""Ways into other programs: each imports its host when it is used."""
