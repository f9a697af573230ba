// Files, batches of reads, writes, memory and checksums.
#include "bind/bindings.h"
#include "io/memory.h"
#include "io/reader.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

using Checksums = Given<std::uint64_t, One>;

Bytes allocate(std::size_t nbytes) { return owned<Bytes>(std::make_unique<HugeBuffer>(nbytes), {nbytes}); }

Checksums xxh3_64_rows(const ConstRows& rows) {
  const std::size_t stride = rows.shape(1);
  require(stride >= kMinHashed, "rows to hash must be at least 512 bytes, got " + std::to_string(stride));
  auto sums = std::make_unique<std::vector<std::uint64_t>>(rows.shape(0));
  {
    const nb::gil_scoped_release unlocked;
    for (std::size_t r = 0; r < sums->size(); ++r) (*sums)[r] = xxh3_64(rows.data() + r * stride, stride);
  }
  return owned<Checksums>(std::move(sums), {rows.shape(0)});
}

constexpr Named<ReadBackendKind> kBackends[] = {
    NAMED(ReadBackendKind, threads), NAMED(ReadBackendKind, io_uring), {"auto", ReadBackendKind::automatic}};

// A batch of reads as Python sees it: it keeps its destinations alive, and never dies with reads under way.
class PyReadBatch {
 public:
  PyReadBatch(std::shared_ptr<Reader> reader, std::shared_ptr<DirectFile> file)
      : reader_(std::move(reader)), file_(std::move(file)) {}
  ~PyReadBatch() {
    reader_->settle(batch_);
    drop();
  }
  PyReadBatch(const PyReadBatch&) = delete;
  PyReadBatch& operator=(const PyReadBatch&) = delete;

  void add(std::uint64_t offset, const ByteArray& destination, const std::optional<ChecksumArray>& checksums,
           std::uint32_t row_nbytes) {
    require(!batch_.in_flight(), "a batch cannot grow while its reads are under way");
    require(destination.nbytes() != 0, "a read needs a destination of at least one byte");
    ReadJob job;
    job.offset = offset;
    job.nbytes = destination.nbytes();
    job.destination = reinterpret_cast<std::byte*>(destination.data());
    if (checksums.has_value()) {
      require(row_nbytes >= kMinHashed && row_nbytes % kHashedMultiple == 0 &&
                  checksums->shape(0) * row_nbytes == job.nbytes,
              "checksums must cover the destination, one a row");
      job.checksums = checksums->data();
      job.row_nbytes = row_nbytes;
      alive_.append(nb::cast(*checksums));
    }
    alive_.append(nb::cast(destination));
    batch_.jobs.push_back(job);
  }

  void submit() {
    reader_->submit(batch_, *file_);
    reader_->start();
  }

  bool poll() {
    require(batch_.in_flight(), "looked for the reads of a batch that was not submitted");
    const nb::gil_scoped_release unlocked;
    return reader_->poll(batch_);
  }

  nb::dict wait() {
    require(batch_.in_flight(), "waited for a read batch that was not submitted");
    struct Finish {
      PyReadBatch& self;
      ~Finish() {
        if (self.batch_.in_flight()) return;  // an interruption: destroying the batch settles it
        self.batch_.jobs.clear();
        self.drop();
      }
    } finish{*this};
    {
      const nb::gil_scoped_release unlocked;
      reader_->wait(batch_);
    }
    const ReadStats& stats = batch_.stats();
    return dict_of({NAMED_MEMBER(stats, jobs), NAMED_MEMBER(stats, requests), NAMED_MEMBER(stats, bytes),
                    NAMED_MEMBER(stats, gap_bytes), NAMED_MEMBER(stats, bounced),
                    NAMED_MEMBER(stats, retries), NAMED_MEMBER(stats, wall_ns)});
  }

 private:
  // Lets the destinations go, but where a read may land there at any time.
  void drop() {
    if (reader_->is_lost()) alive_.release();
    alive_ = nb::list();
  }

  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  ReadBatch batch_;
  nb::list alive_;
};

// Of (offset, array) each.
void write(DirectWriter& self, const std::vector<std::pair<std::uint64_t, ConstBytes>>& runs) {
  std::vector<DirectWriter::Run> all;
  for (const auto& [offset, array] : runs) all.push_back({offset, bytes_of(array), array.nbytes()});
  const nb::gil_scoped_release unlocked;
  self.write(all);
}

}  // namespace

void init_io(nb::module_& m) {
  m.def("allocate", &allocate, "nbytes"_a);
  m.def(
      "populate",
      [](ByteArray memory) {
        const nb::gil_scoped_release unlocked;
        populate(reinterpret_cast<std::byte*>(memory.data()), memory.nbytes());
      },
      "memory"_a);
  m.def("xxh3_64_rows", &xxh3_64_rows, "rows"_a);

  nb::class_<DirectFile>(m, "DirectFile")
      .def(nb::init<std::string, bool>(), "path"_a, "direct"_a = true)
      .def_prop_ro("path", &DirectFile::path)
      .def_prop_ro("size", &DirectFile::size)
      .def_prop_ro("direct", &DirectFile::direct)
      .def_prop_ro("fallback_reason", &DirectFile::fallback_reason)
      .def_prop_ro("offset_alignment", &DirectFile::offset_alignment);

  nb::class_<Reader>(m, "Reader")
      .def(
          "__init__",
          [](Reader* self, int threads, std::uint64_t max_gap, std::uint64_t max_request,
             const std::string& backend, int queue_depth, int patience_ms) {
            require(patience_ms >= 1, "a reader's patience must be at least 1 ms");
            const auto look = [] {
              const nb::gil_scoped_acquire locked;
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
            };
            new (self)
                Reader(ReaderOptions{by_name("backend", backend, kBackends), threads, queue_depth, max_gap,
                                     max_request, std::chrono::milliseconds(patience_ms), look});
          },
          "threads"_a = 32, "max_gap"_a = 0, "max_request"_a = std::uint64_t{1} << 20,
          "backend"_a = "threads", "queue_depth"_a = 64, "patience_ms"_a = 60'000)
      .def_prop_ro("backend", [](const Reader& self) { return name_of(self.options().backend, kBackends); })
      .def_prop_ro("backend_reason", &Reader::backend_reason);

  nb::class_<PyReadBatch>(m, "ReadBatch")
      .def(nb::init<std::shared_ptr<Reader>, std::shared_ptr<DirectFile>>(), "reader"_a, "file"_a)
      .def("add", &PyReadBatch::add, "offset"_a, "destination"_a, "checksums"_a.none() = nb::none(),
           "row_nbytes"_a = 0)
      .def("submit", &PyReadBatch::submit)
      .def("poll", &PyReadBatch::poll)
      .def("wait", &PyReadBatch::wait);

  nb::class_<DirectWriter>(m, "DirectWriter")
      .def(nb::init<std::string, std::uint64_t, int>(), "path"_a, "nbytes"_a, "threads"_a = 4,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("direct", &DirectWriter::direct)
      .def("write", &write, "runs"_a)
      .def("close", &DirectWriter::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashllm
