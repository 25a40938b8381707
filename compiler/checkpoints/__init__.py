"""Reading what people publish: JSON fields, safetensors and torch files, with errors that name file and field."""
