"""One module or package per store, named after its technology; `sql` and `lua` hold their statements."""
