"""Training of the reference models: data, model, loop, export. Not part of the installed package."""
