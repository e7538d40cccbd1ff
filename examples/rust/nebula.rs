//! nebula.h for Rust: what a program needs to save and load, by plain FFI. A handle frees itself, and a call that fails returns an `Error`.

use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void}; // std::ffi has them since Rust 1.64
use std::{fmt, ptr};

pub const FILES_ALL_RANKS: i64 = -2;
const OK: c_int = 0;
const NOT_FOUND: c_int = 20;
const INVALID: c_int = 50;
const I64: c_int = 4;
const F64: c_int = 8;

// The structures of nebula.h, with room for those of a later library.
#[repr(C)]
struct RawError {
    status: c_int,
    sys_errno: c_int,
    http_status: c_int,
    message: [c_char; 512],
    room: [u8; 500],
}

#[repr(C)]
struct RawOptions {
    struct_size: usize,
    persist_path: *const c_char,
    room: [u64; 260],
}

#[repr(C)]
struct RawTensor {
    name: *const c_char,
    dtype: c_int,
    dim_count: u32,
    shape: [u64; 16],
    data: *const c_void,
}

#[link(name = "nebula")]
extern "C" {
    fn nebula_options_init(options: *mut RawOptions);
    fn nebula_session_open(options: *const RawOptions, session: *mut *mut c_void, error: *mut RawError) -> c_int;
    fn nebula_session_close(session: *mut c_void);
    fn nebula_session_flush(session: *mut c_void, tag: *const c_char, timeout_ms: i64, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_begin(session: *mut c_void, tag: *const c_char, files: i64, checkpoint: *mut *mut c_void, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_latest(session: *mut c_void, path: *const c_char, checkpoint: *mut *mut c_void, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_save_tensors(checkpoint: *mut c_void, name: *const c_char, tensors: *const RawTensor, count: usize, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_commit(checkpoint: *mut c_void, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_map(checkpoint: *mut c_void, name: *const c_char, map: *mut *mut c_void, error: *mut RawError) -> c_int;
    fn nebula_checkpoint_free(checkpoint: *mut c_void);
    fn nebula_map_tensor(map: *const c_void, name: *const c_char, tensor: *mut RawTensor, error: *mut RawError) -> c_int;
    fn nebula_map_free(map: *mut c_void);
}

/// A call that failed, with the status of nebula.h.
#[derive(Debug)]
pub struct Error {
    pub status: i32,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

fn check(call: impl FnOnce(*mut RawError) -> c_int) -> Result<(), Error> {
    let mut error = RawError { status: 0, sys_errno: 0, http_status: 0, message: [0; 512], room: [0; 500] };
    match call(&mut error) {
        OK => Ok(()),
        // SAFETY: the library ends the message with a zero.
        status => Err(Error { status, message: unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy().into_owned() }),
    }
}

fn text(of: &str) -> Result<CString, Error> {
    CString::new(of).map_err(|_| Error { status: INVALID, message: format!("{of:?} has a zero byte") })
}

/// The types of elements of this file. nebula.h has more.
pub trait Element: Copy {
    const DTYPE: c_int;
}
impl Element for i64 {
    const DTYPE: c_int = I64;
}
impl Element for f64 {
    const DTYPE: c_int = F64;
}

/// The connection to this node's agent. At its end it waits for running copies.
pub struct Session(*mut c_void);

impl Session {
    pub fn open(path: &str) -> Result<Session, Error> {
        let path = text(path)?;
        let mut options = RawOptions { struct_size: 0, persist_path: ptr::null(), room: [0; 260] };
        let mut handle = ptr::null_mut();
        // SAFETY: the library keeps none of the pointers.
        unsafe { nebula_options_init(&mut options) };
        options.persist_path = path.as_ptr();
        check(|error| unsafe { nebula_session_open(&options, &mut handle, error) })?;
        Ok(Session(handle))
    }

    pub fn begin(&self, tag: &str, files: i64) -> Result<Checkpoint<'_>, Error> {
        let (tag, mut handle) = (text(tag)?, ptr::null_mut());
        check(|error| unsafe { nebula_checkpoint_begin(self.0, tag.as_ptr(), files, &mut handle, error) })?;
        Ok(Checkpoint { handle, _session: self })
    }

    /// Finds the newest complete checkpoint, if there is one.
    pub fn latest(&self) -> Result<Option<Checkpoint<'_>>, Error> {
        let mut handle = ptr::null_mut();
        match check(|error| unsafe { nebula_checkpoint_latest(self.0, ptr::null(), &mut handle, error) }) {
            Ok(()) => Ok(Some(Checkpoint { handle, _session: self })),
            Err(error) if error.status == NOT_FOUND => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until all committed checkpoints are durable.
    pub fn flush(&self, timeout_ms: i64) -> Result<(), Error> {
        check(|error| unsafe { nebula_session_flush(self.0, ptr::null(), timeout_ms, error) })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        unsafe { nebula_session_close(self.0) }
    }
}

/// An array of a save: its name, its elements, its shape.
pub struct Tensor<'a> {
    name: CString,
    dtype: c_int,
    shape: Vec<u64>,
    data: *const c_void,
    _data: std::marker::PhantomData<&'a ()>,
}

pub fn tensor<'a, T: Element>(name: &str, data: &'a [T], shape: &[u64]) -> Result<Tensor<'a>, Error> {
    if shape.len() > 16 || shape.iter().product::<u64>() != data.len() as u64 {
        return Err(Error { status: INVALID, message: format!("tensor {name:?} does not have the elements of its shape") });
    }
    let data = data.as_ptr().cast();
    Ok(Tensor { name: text(name)?, dtype: T::DTYPE, shape: shape.to_vec(), data, _data: std::marker::PhantomData })
}

pub struct Checkpoint<'a> {
    handle: *mut c_void,
    _session: &'a Session,
}

impl Checkpoint<'_> {
    /// Saves a file that torch.load reads as a dict. The program may change the arrays when this returns.
    pub fn save(&self, name: &str, tensors: &[Tensor]) -> Result<(), Error> {
        let name = text(name)?;
        let raw: Vec<RawTensor> = tensors
            .iter()
            .map(|tensor| {
                let mut shape = [0; 16];
                shape[..tensor.shape.len()].copy_from_slice(&tensor.shape);
                RawTensor { name: tensor.name.as_ptr(), dtype: tensor.dtype, dim_count: tensor.shape.len() as u32, shape, data: tensor.data }
            })
            .collect();
        check(|error| unsafe { nebula_checkpoint_save_tensors(self.handle, name.as_ptr(), raw.as_ptr(), raw.len(), error) })
    }

    /// Closes this rank's part. It waits for no other rank, no copy and no storage.
    pub fn commit(&self) -> Result<(), Error> {
        check(|error| unsafe { nebula_checkpoint_commit(self.handle, error) })
    }

    pub fn map(&self, name: &str) -> Result<Map, Error> {
        let (name, mut handle) = (text(name)?, ptr::null_mut());
        check(|error| unsafe { nebula_checkpoint_map(self.handle, name.as_ptr(), &mut handle, error) })?;
        Ok(Map(handle))
    }
}

impl Drop for Checkpoint<'_> {
    fn drop(&mut self) {
        unsafe { nebula_checkpoint_free(self.handle) }
    }
}

/// The verified bytes of a file.
pub struct Map(*mut c_void);

impl Map {
    /// Copies a tensor of the file. It must have the type and the number of elements of `target`.
    pub fn read<T: Element>(&self, name: &str, target: &mut [T]) -> Result<(), Error> {
        let mut found = RawTensor { name: ptr::null(), dtype: 0, dim_count: 0, shape: [0; 16], data: ptr::null() };
        let raw = text(name)?;
        check(|error| unsafe { nebula_map_tensor(self.0, raw.as_ptr(), &mut found, error) })?;
        let count: u64 = found.shape[..found.dim_count as usize].iter().product();
        if found.dtype != T::DTYPE || count != target.len() as u64 {
            return Err(Error { status: INVALID, message: format!("tensor {name:?} has another type or size in the checkpoint") });
        }
        // SAFETY: the map has so many elements of this type. They need not be aligned.
        unsafe { ptr::copy_nonoverlapping(found.data.cast::<u8>(), target.as_mut_ptr().cast(), std::mem::size_of_val(target)) };
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        unsafe { nebula_map_free(self.0) }
    }
}
