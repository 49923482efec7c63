"""The only functions that patches and plugins call; one package for each engine."""
