"""The public ops, one file each: contract, schema, fake and float64 reference."""
