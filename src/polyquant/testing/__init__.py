"""What polyquant's parts promise, as plain functions that raise AssertionError: for the tests of this package and of packages that add to it.

codecs          check_codec: sizes, round trips, slices, errors, claimed capabilities
architectures   a record: names both ways, hyper-parameters, a tiny model that converts and runs
formats         check_format: sniffing, opening, findings; check_target: a model written, read back, validated
"""
