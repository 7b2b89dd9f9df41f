// Tapes as Python sees them: `with Tape() as tape:` records what this thread runs in between, `tape.run(position)` runs it again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "tape.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

struct Lent {
  std::shared_ptr<Lender> memory;
  float* data;
  size_t floats;
};

// float32 of that shape in the memory of the tape being recorded; None if there is none.
nb::object lent(const std::vector<size_t>& shape) {
  if (!recording) return nb::none();
  size_t floats = 1;
  for (size_t n : shape) floats *= n;
  auto loan = std::make_unique<Lent>(Lent{recording->memory, recording->memory->lend(floats), floats});
  float* data = loan->data;
  nb::capsule owner(loan.release(), [](void* p) noexcept {
    const std::unique_ptr<Lent> back(static_cast<Lent*>(p));
    back->memory->take_back(back->data, back->floats);
  });
  return nb::cast(nb::ndarray<nb::numpy, float>(data, shape.size(), shape.data(), owner));
}

void begin(Tape& tape) {
  if (recording) throw std::runtime_error("a tape is recording already");
  recording = &tape;
}

void run(const Tape& tape, size_t position) {
  if (recording || !tape.complete || position >= tape.room) throw nb::value_error("this tape cannot run here");
  nb::gil_scoped_release release;
  const KernelTime time;
  tape.run(position);
}

}  // namespace

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("__enter__", [](nb::pointer_and_handle<Tape> tape) { return begin(*tape.p), nb::borrow(tape.h); })
      .def("__exit__", [](Tape& tape, nb::args) {
        if (recording == &tape) recording = nullptr;
      })
      .def("run", &run, "position"_a)
      .def_ro("complete", &Tape::complete)
      .def_ro("room", &Tape::room)
      .def_prop_ro("nbytes", [](const Tape& tape) { return tape.memory->bytes(); });
  m.def("lent", &lent, "shape"_a);
}

}  // namespace polyquant
