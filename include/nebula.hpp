// nebula.hpp - nebula.h for C++17: handles that are freed at the end of their scope, and exceptions in place of statuses.
//
//     nebula::session session("/scratch/run7");
//     if (auto checkpoint = session.latest())
//             checkpoint.map("state.pt").read("at", at);
//     ...
//     auto checkpoint = session.begin("step50");
//     checkpoint.save("state.pt", {nebula::tensor("at", at)});
//     checkpoint.commit();
//
// Elements are those of any contiguous container: std::vector, std::array, C++20's std::span. Handles can be moved and not copied. All calls that nebula.h has and this file lacks take the plain handle of get().
#ifndef NEBULA_HPP
#define NEBULA_HPP

#include <nebula.h>

#include <complex>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace nebula {

// A call that failed. status(): of nebula.h, NEBULA_NOT_FOUND and NEBULA_TIMEOUT among them.
class error : public std::runtime_error {
public:
        explicit error(const nebula_error &failure) : std::runtime_error(failure.message), status_(failure.status) {}
        error(nebula_status status, const std::string &text) : std::runtime_error(text), status_(status) {}
        nebula_status status() const noexcept { return status_; }

private:
        nebula_status status_;
};

namespace detail {

template <auto free> struct freer {
        template <class T> void operator()(T *handle) const noexcept { free(handle); }
};
template <class T, auto free> using handle = std::unique_ptr<T, freer<free>>;

inline void check(nebula_status status, const nebula_error &failure)
{
        if (status != NEBULA_OK)
                throw error(failure);
}

template <class> inline constexpr bool is_none_of_these = false;

template <class T> constexpr nebula_dtype dtype_of()
{
        if constexpr (std::is_same_v<T, bool>) return NEBULA_DTYPE_BOOL;
        else if constexpr (std::is_same_v<T, float>) return NEBULA_DTYPE_F32;
        else if constexpr (std::is_same_v<T, double>) return NEBULA_DTYPE_F64;
        else if constexpr (std::is_same_v<T, std::complex<float>>) return NEBULA_DTYPE_C64;
        else if constexpr (std::is_same_v<T, std::complex<double>>) return NEBULA_DTYPE_C128;
        else if constexpr (std::is_integral_v<T> && sizeof(T) == 8) return NEBULA_DTYPE_I64;
        else if constexpr (std::is_integral_v<T> && sizeof(T) == 4) return NEBULA_DTYPE_I32;
        else if constexpr (std::is_integral_v<T> && sizeof(T) == 2) return NEBULA_DTYPE_I16;
        else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) return NEBULA_DTYPE_I8;
        else if constexpr (std::is_integral_v<T>) return NEBULA_DTYPE_U8;
        else static_assert(is_none_of_these<T>, "nebula: no checkpoint has elements of this type");
}

} // namespace detail

// Describes a dense array in row-major order. name and data must stay until the save has returned. Unsigned elements of 2, 4 and 8 bytes are
// saved as signed ones of that size, which the formats have.
template <class T> nebula_tensor tensor(const char *name, const T *data, std::initializer_list<std::uint64_t> shape)
{
        nebula_tensor made{};

        if (shape.size() > NEBULA_DIM_MAX)
                throw error(NEBULA_INVALID, std::string("tensor \"") + name + "\" has too many dimensions");
        made.name = name, made.dtype = detail::dtype_of<T>(), made.data = data;
        for (auto size : shape)
                made.shape[made.dim_count++] = size;
        return made;
}

// Describes the elements of a container as an array of one dimension.
template <class Container> auto tensor(const char *name, const Container &elements) -> decltype(tensor(name, std::data(elements), {}))
{
        return tensor(name, std::data(elements), {std::size(elements)});
}

// Elements that lie in a map, for as long as the map lives.
template <class T> class view {
public:
        view(const T *data, std::vector<std::uint64_t> shape) : data_(data), shape_(std::move(shape))
        {
                for (auto size : shape_)
                        size_ *= static_cast<std::size_t>(size);
        }
        const T *data() const noexcept { return data_; }
        std::size_t size() const noexcept { return size_; }
        const std::vector<std::uint64_t> &shape() const noexcept { return shape_; }
        const T *begin() const noexcept { return data_; }
        const T *end() const noexcept { return data_ + size_; }
        const T &operator[](std::size_t index) const { return data_[index]; }

private:
        const T *data_;
        std::vector<std::uint64_t> shape_;
        std::size_t size_ = 1;
};

// The verified bytes of a file.
class map {
public:
        explicit map(nebula_map *owned) : handle_(owned) {}
        nebula_map *get() const noexcept { return handle_.get(); }
        const void *data() const noexcept { return nebula_map_data(get()); }
        std::uint64_t size() const noexcept { return nebula_map_size(get()); }

        nebula_tensor find(const char *name) const
        {
                nebula_tensor found{};
                nebula_error failure{};

                detail::check(nebula_map_tensor(get(), name, &found, &failure), failure);
                return found;
        }

        // The tensor `name`, without a copy. Throws if it has another type.
        template <class T> nebula::view<T> view(const char *name) const
        {
                const nebula_tensor found = find(name);

                if (found.dtype != detail::dtype_of<T>())
                        throw error(NEBULA_INVALID, std::string("tensor \"") + name + "\" has another type in the checkpoint");
                return {static_cast<const T *>(found.data), {found.shape, found.shape + found.dim_count}};
        }

        // Copies the tensor `name` to `target`, which has `count` elements. Throws if it has another type or number of elements.
        template <class T> void read(const char *name, T *target, std::size_t count) const
        {
                const auto found = view<T>(name);

                if (found.size() != count)
                        throw error(NEBULA_INVALID, std::string("tensor \"") + name + "\" has another size in the checkpoint");
                if (count)
                        std::memcpy(static_cast<void *>(target), found.data(), count * sizeof(T));
        }
        template <class Container> auto read(const char *name, Container &&target) const -> decltype(read(name, std::data(target), std::size(target)))
        {
                read(name, std::data(target), std::size(target));
        }

private:
        detail::handle<nebula_map, nebula_map_free> handle_;
};

// A checkpoint that is begun or was found. False in a condition: a search found none.
class checkpoint {
public:
        explicit checkpoint(nebula_checkpoint *owned = nullptr) : handle_(owned) {}
        nebula_checkpoint *get() const noexcept { return handle_.get(); }
        explicit operator bool() const noexcept { return get() != nullptr; }
        std::string tag() const { return nebula_checkpoint_tag(get()); }

        // Saves a file that torch.load reads as a dict. The program may change the arrays when this returns.
        void save(const char *name, const std::vector<nebula_tensor> &tensors)
        {
                nebula_error failure{};

                detail::check(nebula_checkpoint_save_tensors(get(), name, tensors.data(), tensors.size(), &failure), failure);
        }

        // Saves a file of any format.
        void save_bytes(const char *name, const void *data, std::size_t size)
        {
                const nebula_range range{data, size};
                nebula_error failure{};

                detail::check(nebula_checkpoint_save_bytes(get(), name, &range, 1, &failure), failure);
        }

        void commit()
        {
                nebula_error failure{};

                detail::check(nebula_checkpoint_commit(get(), &failure), failure);
        }

        // Gives this checkpoint up; earlier complete ones stay.
        void fail(const char *reason)
        {
                nebula_error failure{};

                detail::check(nebula_checkpoint_fail(get(), reason, &failure), failure);
        }

        nebula_state state() const
        {
                nebula_state found{};
                nebula_error failure{};

                detail::check(nebula_checkpoint_state(get(), &found, &failure), failure);
                return found;
        }

        // timeout_ms < 0: no limit. Throws an error with NEBULA_TIMEOUT if the state is not reached, and the reason if it never will be.
        void wait(nebula_state state = NEBULA_STATE_DURABLE, std::int64_t timeout_ms = -1)
        {
                nebula_error failure{};

                detail::check(nebula_checkpoint_wait(get(), state, timeout_ms, &failure), failure);
        }

        nebula::map map(const char *name) const
        {
                nebula_map *made = nullptr;
                nebula_error failure{};

                detail::check(nebula_checkpoint_map(get(), name, &made, &failure), failure);
                return nebula::map(made);
        }

private:
        detail::handle<nebula_checkpoint, nebula_checkpoint_free> handle_;
};

// The connection to this node's agent. Its end waits for running copies; the agent then works on in the background.
class session {
public:
        explicit session(const std::string &persist_path)
        {
                nebula_options options;

                nebula_options_init(&options);
                options.persist_path = persist_path.c_str();
                open(options);
        }
        explicit session(const nebula_options &options) { open(options); }
        nebula_session *get() const noexcept { return handle_.get(); }

        // file_count: how many files complete the checkpoint, or one of NEBULA_FILES_OPEN, NEBULA_FILES_ALL_RANKS.
        checkpoint begin(const std::string &tag, std::int64_t file_count = NEBULA_FILES_ALL_RANKS)
        {
                nebula_checkpoint *made = nullptr;
                nebula_error failure{};

                detail::check(nebula_checkpoint_begin(get(), tag.c_str(), file_count, &made, &failure), failure);
                return checkpoint(made);
        }

        // The newest complete checkpoint. It is empty if there is none; a search that fails throws.
        checkpoint latest() { return found([](auto... all) { return nebula_checkpoint_latest(all...); }, get(), nullptr); }
        checkpoint find(const std::string &tag)
        {
                return found([](auto... all) { return nebula_checkpoint_find(all...); }, get(), tag.c_str(), nullptr);
        }

        // Waits until all committed checkpoints are durable. timeout_ms < 0: no limit.
        void flush(std::int64_t timeout_ms = -1)
        {
                nebula_error failure{};

                detail::check(nebula_session_flush(get(), nullptr, timeout_ms, &failure), failure);
        }

        // JSON. NEBULA_REPORT_VERSIONS lists the checkpoints in memory and in storage.
        std::string report(nebula_report which)
        {
                char *text = nullptr;
                nebula_error failure{};

                detail::check(nebula_session_report(get(), which, nullptr, &text, &failure), failure);
                const detail::handle<char, nebula_text_free> owned(text);
                return text;
        }

private:
        void open(const nebula_options &options)
        {
                nebula_session *made = nullptr;
                nebula_error failure{};

                detail::check(nebula_session_open(&options, &made, &failure), failure);
                handle_.reset(made);
        }

        template <class Search, class... Arguments> static checkpoint found(Search search, Arguments... arguments)
        {
                nebula_checkpoint *made = nullptr;
                nebula_error failure{};
                const nebula_status status = search(arguments..., &made, &failure);

                if (status != NEBULA_NOT_FOUND)
                        detail::check(status, failure);
                return checkpoint(made);
        }

        detail::handle<nebula_session, nebula_session_close> handle_;
};

} // namespace nebula

#endif
