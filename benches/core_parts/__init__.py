"""The parts of `./bench core`."""
