"""Privacy filters and odometers for fully adaptive analysis."""
