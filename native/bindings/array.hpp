// Array arguments of the bindings: nanobind's, aligned to their element type. numpy also makes others, e.g. floats at
// an odd offset of a buffer; reading them as floats is undefined.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace polyquant {

template <class... Args>
struct Array : nanobind::ndarray<Args...> {
  using nanobind::ndarray<Args...>::ndarray;
  Array(nanobind::ndarray<Args...>&& other) : nanobind::ndarray<Args...>(std::move(other)) {}

  bool aligned() const {
    const size_t bytes = this->dtype().bits / 8u;
    return bytes < 2 || this->size() == 0 || reinterpret_cast<uintptr_t>(this->data()) % bytes == 0;
  }
};

}  // namespace polyquant

// As for an array of a different type: copied where the argument may be converted, otherwise a TypeError.
template <class... Args>
struct nanobind::detail::type_caster<polyquant::Array<Args...>> {
  using Base = type_caster<ndarray<Args...>>;
  NB_TYPE_CASTER(polyquant::Array<Args...>, Base::Name)

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    Base base;
    if (!base.from_python(src, flags, cleanup)) return false;
    value = polyquant::Array<Args...>(std::move(base.value));
    if (!value.is_valid() || value.aligned()) return true;
    if (!(flags & cast_flags::convert)) return false;
    try {
      if (!base.from_python(src.attr("copy")(), flags, cleanup)) return false;
    } catch (const python_error&) {
      return false;
    }
    value = polyquant::Array<Args...>(std::move(base.value));
    return value.aligned();
  }
};
