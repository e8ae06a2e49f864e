"""What accmt needs of other libraries: their versions, and those of their names that are not public."""
