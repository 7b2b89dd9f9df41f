// Python bindings of tapes: `with Tape() as tape:` records the operations of this thread, `tape.run(position)` replays
// them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "base/threads.hpp"
#include "bindings/bindings.hpp"
#include "decoder/tape.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

struct Lent {
  std::shared_ptr<Lender> memory;
  float* data;
  size_t floats;
};

constexpr size_t kMostFloats = size_t(1) << 40;

// Returns a float32 array in the memory of the active tape; None without one.
nb::object lent(const std::vector<size_t>& shape) {
  if (!recording) return nb::none();
  size_t floats = 1;
  for (size_t n : shape)
    if (n == 0 || floats <= kMostFloats / n)
      floats *= n;
    else
      throw nb::value_error("the shape of the activations is too large");
  auto loan = std::make_unique<Lent>(Lent{recording->memory, recording->memory->lend(floats), floats});
  float* data = loan->data;
  nb::capsule owner(loan.release(), [](void* p) noexcept {
    const std::unique_ptr<Lent> back(static_cast<Lent*>(p));
    back->memory->take_back(back->data, back->floats);
  });
  return nb::cast(nb::ndarray<nb::numpy, float>(data, shape.size(), shape.data(), owner));
}

// The thread holds a reference to the tape that it records, so `recording` cannot dangle.
nb::object begin(nb::pointer_and_handle<Tape> tape) {
  if (recording || tape.p->busy) throw std::runtime_error("a tape is already recording");
  recording = tape.p;
  recording->busy = true;
  tape.h.inc_ref();
  return nb::borrow(tape.h);
}

void end(nb::pointer_and_handle<Tape> tape) {
  if (recording != tape.p) return;
  recording->busy = false;
  recording = nullptr;
  tape.h.dec_ref();
}

void run(Tape& tape, size_t position) {
  if (recording || tape.busy || !tape.complete || position >= tape.room)
    throw nb::value_error("this tape cannot run at this position");
  struct Busy {
    bool& flag;
    explicit Busy(bool& f) : flag(f) { flag = true; }
    ~Busy() { flag = false; }
  } busy(tape.busy);
  nb::gil_scoped_release release;
  const KernelTime time;
  tape.run(position);
}

}  // namespace

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("__enter__", &begin)
      .def("__exit__", [](nb::pointer_and_handle<Tape> tape, nb::args) { end(tape); })
      .def("run", &run, "position"_a)
      .def_ro("complete", &Tape::complete)
      .def_ro("room", &Tape::room)
      .def_prop_ro("nbytes", [](const Tape& tape) { return tape.memory->bytes(); });
  m.def("lent", &lent, "shape"_a);
}

}  // namespace polyquant
