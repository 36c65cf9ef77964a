"""One module per store, named after its technology; siblings with its name as prefix hold its parts."""
