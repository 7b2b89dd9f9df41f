// What the files that know Python share. NB_MODULE stands in bindings.cpp; each other file adds its functions to it.
#pragma once

#include <nanobind/nanobind.h>

namespace polyquant {

void bind_decoder(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
void bind_trellis(nanobind::module_& m);

}  // namespace polyquant
