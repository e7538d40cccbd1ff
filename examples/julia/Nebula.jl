# nebula.h for Julia: what a program needs to save and load, by ccall. A call that fails throws a NebulaError.
module Nebula

export Session, begin_checkpoint, latest, flush_all, save, commit, load!

const LIBRARY = "libnebula"
const FILES_ALL_RANKS = Int64(-2)
const NOT_FOUND = Cint(20)
const DTYPES = Dict(Int8 => 1, Int16 => 2, Int32 => 3, Int64 => 4, Float16 => 5, Float32 => 7, Float64 => 8, ComplexF32 => 9, ComplexF64 => 10)

struct NebulaError <: Exception
    status::Cint
    message::String
end
Base.showerror(io::IO, failure::NebulaError) = print(io, "Nebula: ", failure.message)

# The structures of nebula.h are buffers here, with room for those of a later library.
const ERROR_BYTES, OPTIONS_BYTES, TENSOR_BYTES = 1024, 2096, 152
const PATH_AT, MESSAGE_AT = sizeof(Csize_t), 3 * sizeof(Cint)

function check(call)
    error = zeros(UInt8, ERROR_BYTES)
    status = call(error)::Cint
    status == 0 && return
    throw(NebulaError(status, GC.@preserve error unsafe_string(pointer(error, 1 + MESSAGE_AT))))
end

mutable struct Session
    handle::Ptr{Cvoid}
    function Session(path::AbstractString)
        options, handle, text = zeros(UInt8, OPTIONS_BYTES), Ref(C_NULL), String(path)
        ccall((:nebula_options_init, LIBRARY), Cvoid, (Ptr{UInt8},), options)
        GC.@preserve options text begin
            unsafe_store!(Ptr{Ptr{UInt8}}(pointer(options, 1 + PATH_AT)), pointer(text))
            check(error -> ccall((:nebula_session_open, LIBRARY), Cint, (Ptr{UInt8}, Ptr{Ptr{Cvoid}}, Ptr{UInt8}), options, handle, error))
        end
        new(handle[])
    end
end

# Waits for running copies; the agent then works on in the background.
function Base.close(session::Session)
    ccall((:nebula_session_close, LIBRARY), Cvoid, (Ptr{Cvoid},), session.handle)
    session.handle = C_NULL
end

mutable struct Checkpoint
    handle::Ptr{Cvoid}
    session::Session
    function Checkpoint(handle, session)
        made = new(handle, session)
        finalizer(it -> ccall((:nebula_checkpoint_free, LIBRARY), Cvoid, (Ptr{Cvoid},), it.handle), made)
    end
end

function begin_checkpoint(session::Session, tag::AbstractString)
    handle = Ref(C_NULL)
    check(error -> ccall((:nebula_checkpoint_begin, LIBRARY), Cint, (Ptr{Cvoid}, Cstring, Int64, Ptr{Ptr{Cvoid}}, Ptr{UInt8}),
        session.handle, tag, FILES_ALL_RANKS, handle, error))
    Checkpoint(handle[], session)
end

# Finds the newest complete checkpoint; nothing: there is none.
function latest(session::Session)
    handle = Ref(C_NULL)
    try
        check(error -> ccall((:nebula_checkpoint_latest, LIBRARY), Cint, (Ptr{Cvoid}, Ptr{UInt8}, Ptr{Ptr{Cvoid}}, Ptr{UInt8}),
            session.handle, C_NULL, handle, error))
    catch failure
        failure isa NebulaError && failure.status == NOT_FOUND && return nothing
        rethrow()
    end
    Checkpoint(handle[], session)
end

# Waits until all committed checkpoints are durable.
flush_all(session::Session, timeout_ms::Integer = -1) = check(error -> ccall((:nebula_session_flush, LIBRARY), Cint,
    (Ptr{Cvoid}, Ptr{UInt8}, Int64, Ptr{UInt8}), session.handle, C_NULL, timeout_ms, error))

# Saves arrays as one file. The program may change them when this returns. The file is a torch file: there, an array has its dimensions in
# reverse order, because Julia's first index runs fastest.
function save(checkpoint::Checkpoint, file::AbstractString, arrays::Pair{String,<:Array}...)
    tensors = zeros(UInt8, TENSOR_BYTES * length(arrays))
    names = String[name for (name, _) in arrays]
    GC.@preserve tensors names arrays begin
        for (i, (_, array)) in enumerate(arrays)
            at = pointer(tensors) + TENSOR_BYTES * (i - 1)
            unsafe_store!(Ptr{Ptr{UInt8}}(at), pointer(names[i]))
            unsafe_store!(Ptr{Cint}(at + 8), Cint(DTYPES[eltype(array)]))
            unsafe_store!(Ptr{UInt32}(at + 12), UInt32(ndims(array)))
            for (k, count) in enumerate(reverse(size(array)))
                unsafe_store!(Ptr{UInt64}(at + 16), UInt64(count), k)
            end
            unsafe_store!(Ptr{Ptr{Cvoid}}(at + 144), Ptr{Cvoid}(pointer(array)))
        end
        check(error -> ccall((:nebula_checkpoint_save_tensors, LIBRARY), Cint, (Ptr{Cvoid}, Cstring, Ptr{UInt8}, Csize_t, Ptr{UInt8}),
            checkpoint.handle, file, tensors, length(arrays), error))
    end
end

# Closes this rank's part. It waits for no other rank, no copy and no storage.
commit(checkpoint::Checkpoint) =
    check(error -> ccall((:nebula_checkpoint_commit, LIBRARY), Cint, (Ptr{Cvoid}, Ptr{UInt8}), checkpoint.handle, error))

# Copies arrays of a file into arrays of the same type and size.
function load!(checkpoint::Checkpoint, file::AbstractString, arrays::Pair{String,<:Array}...)
    map = Ref(C_NULL)
    check(error -> ccall((:nebula_checkpoint_map, LIBRARY), Cint, (Ptr{Cvoid}, Cstring, Ptr{Ptr{Cvoid}}, Ptr{UInt8}),
        checkpoint.handle, file, map, error))
    try
        for (name, array) in arrays
            found = zeros(UInt64, TENSOR_BYTES ÷ 8)
            check(error -> ccall((:nebula_map_tensor, LIBRARY), Cint, (Ptr{Cvoid}, Cstring, Ptr{UInt64}, Ptr{UInt8}), map[], name, found, error))
            dtype, dims = reinterpret(UInt32, found[2:2])
            shape = Tuple(Int.(reverse(found[3:2+dims])))
            dtype == DTYPES[eltype(array)] && shape == size(array) ||
                throw(NebulaError(50, "array \"$name\" of file \"$file\" has another type or shape in the checkpoint"))
            GC.@preserve array unsafe_copyto!(Ptr{UInt8}(pointer(array)), Ptr{UInt8}(UInt(found[19])), sizeof(array))
        end
    finally
        ccall((:nebula_map_free, LIBRARY), Cvoid, (Ptr{Cvoid},), map[])
    end
end

end
