"""What polyquant's parts promise, as plain functions that assert: for the tests of this package and of packages that add codecs to it. Needs no pytest."""
