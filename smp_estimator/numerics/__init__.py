"""What two trainings differ in, from the numbers that their ranks have recorded."""
