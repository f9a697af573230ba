// What sequences leave behind.
#include "bind/bindings.h"
#include "sequence/sequence_state.h"

namespace flashllm {

namespace {

// The pages of `owner`, which lives as long as the arrays.
std::vector<std::vector<Bytes>> arrays_of(nb::handle owner, const SequenceState::Spans& spans) {
  std::vector<std::vector<Bytes>> arrays;
  for (const auto& of_kind : spans) {
    arrays.emplace_back();
    for (const SequenceState::Span& span : of_kind)
      arrays.back().emplace_back(reinterpret_cast<std::uint8_t*>(span.data),
                                 std::initializer_list<std::size_t>{span.nbytes}, owner);
  }
  return arrays;
}

}  // namespace

void init_state(nb::module_& m) {
  m.attr("PAGE_TOKENS") = kPageTokens;  // positions of a sequence whose keys and values lie together
  nb::class_<StateShape>(m, "StateShape")
      .def(
          "__init__",
          [](StateShape* self, nb::handle block, std::size_t context, std::size_t part_tokens,
             const std::string& dtype, int bits) {
            std::vector<LayerKv> layers;
            for (const LayerSpec& layer : read_architecture(block).layers)
              layers.push_back({layer.attention.kv_heads, layer.attention.head_dim, layer.attention.window,
                                layer.attention.is_latent(), layer.state.state_floats(),
                                layer.attention.shared});
            new (self) StateShape(layers, context, part_tokens, parse_dtype(dtype), bits);
          },
          "block"_a, "context"_a, "part_tokens"_a, "dtype"_a, "bits"_a = 0)
      .def_prop_ro("page_nbytes", &StateShape::page_nbytes)
      .def("nbytes", &StateShape::nbytes, "length"_a);

  nb::class_<StatePool>(m, "StatePool")
      .def(nb::init<const StateShape&>(), "shape"_a)
      .def_prop_ro("nbytes", &StatePool::nbytes);

  nb::class_<SequenceState>(m, "SequenceState")
      .def(nb::init<std::shared_ptr<StatePool>>(), "pool"_a)
      .def_prop_ro("length", &SequenceState::length)
      .def_prop_ro("prompted", &SequenceState::prompted)
      .def_prop_ro("context", [](const SequenceState& self) { return self.shape().context(); })
      .def("nbytes_to_add", &SequenceState::nbytes_to_add, "length"_a, "together"_a = 0)
      .def_prop_ro("nbytes_alone", &SequenceState::nbytes_alone)
      .def("mark", &SequenceState::mark, "positions"_a)
      .def(
          "commit", [](SequenceState& self, std::size_t length) { self.commit(length); }, "length"_a)
      .def("can_keep", &SequenceState::can_keep, "length"_a)
      .def("keep", &SequenceState::keep, "length"_a)
      .def("copy_from", &SequenceState::copy_from, "other"_a)
      .def("save",
           [](nb::handle_t<SequenceState> self) {
             return arrays_of(self, nb::cast<SequenceState&>(self).save());
           })
      .def(
          "restore",
          [](nb::handle_t<SequenceState> self, std::size_t length, const std::vector<std::size_t>& pages,
             std::size_t prompted) {
            return arrays_of(self, nb::cast<SequenceState&>(self).restore(length, pages, prompted));
          },
          "length"_a, "pages"_a, "prompted"_a = 0);
}

}  // namespace flashllm
