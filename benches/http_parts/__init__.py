"""Parts of `./bench http`."""
