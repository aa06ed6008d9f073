"""One privacy filter per person, for any number of people: nobody is left out before their own budget is spent."""
