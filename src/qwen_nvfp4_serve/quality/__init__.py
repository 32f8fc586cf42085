"""Does the model still answer right: generated tasks with one answer each, scored exactly, against any endpoint."""
