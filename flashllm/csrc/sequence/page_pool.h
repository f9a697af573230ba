// Memory in pages of one size, for keys and values: each goes back to the system when nobody holds it any
// more.
//
// Addresses are reserved for many pages at once, memory is taken page by page as it is written. A page may
// have several holders, in any threads; who writes must be the only one.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace flashllm {

using Page = std::shared_ptr<std::byte>;

class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  // `nbytes` a page, in whole pages of the system; `together`: pages whose addresses are reserved at once.
  PagePool(std::size_t nbytes, std::size_t together) : page_nbytes_(nbytes), together_(together) {}
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  std::size_t page_nbytes() const { return page_nbytes_; }
  std::size_t nbytes() const { return taken_ * page_nbytes_; }  // of all pages that somebody holds

  // A page of zeros. Throws CoreError (io) when the system refuses the addresses.
  Page take();

 private:
  struct Chunk {
    void* mapping;
    std::size_t nbytes;
  };
  void reserve();
  void give_back(std::byte* page) noexcept;

  const std::size_t page_nbytes_, together_;
  std::atomic<std::size_t> taken_{0};
  std::mutex lock_;  // of what follows
  std::vector<Chunk> chunks_;
  std::vector<std::byte*> free_;  // has room for every page
};

}  // namespace flashllm
