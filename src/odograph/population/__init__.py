"""One privacy filter per person, for any number of people: each takes part until their own budget is spent."""
