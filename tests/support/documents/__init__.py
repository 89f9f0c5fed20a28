"""What documents are made of and checked by: blocks of code, pictures, tables."""
