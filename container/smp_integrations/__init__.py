"""What other training libraries need of this one; each file is loaded only by a script that uses its library."""
