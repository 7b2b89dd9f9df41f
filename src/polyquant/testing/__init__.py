"""Contract checks that raise AssertionError, for the tests of this package and of plugins.

codecs          check_codec: sizes, round trips, slices, errors, declared capabilities
architectures   check_record, check_model: names, hyper-parameters, a tiny model that converts and runs
formats         check_format: sniffing, opening, findings; check_target: write, read back, validate
"""
