! Saves arrays of each rank, and loads them. For test_installed.py.
program check
  use nebula
  use, intrinsic :: iso_c_binding, only: c_f_pointer, c_loc
  use, intrinsic :: iso_fortran_env, only: real32, real64, int32, int64
  implicit none
  type(nebula_session) :: session
  type(nebula_checkpoint) :: checkpoint
  real(real32) :: cube(2, 3, 4)
  real(real64), target :: line(5)
  real(real64), pointer, contiguous :: large(:)
  complex(real64) :: wave(2)
  integer(int32) :: number, other(3)
  integer :: status
  character(len=1000) :: path
  character(len=:), allocatable :: text
  call get_command_argument(1, path)
  call session%open(path)
  call session%latest(checkpoint, status)
  if (status /= NEBULA_NOT_FOUND) error stop 'found one'
  cube = reshape([(real(number), number = 1, 24)], [2, 3, 4])
  line = 2.5d0
  wave = (1d0, -1d0)
  number = 7
  call session%begin('step1', checkpoint)
  call checkpoint%add('cube', cube)
  call checkpoint%add('line', line)
  call checkpoint%add('wave', wave)
  call checkpoint%add('number', number)
  call checkpoint%save('', status) ! a file has a name
  if (status /= NEBULA_INVALID) error stop 'saved a file without a name'
  call checkpoint%save('all.pt') ! tries again, with the same arrays
  call checkpoint%commit()
  cube = 0
  wave = 0
  call checkpoint%wait(timeout_ms=60000)
  call session%begin('step2', checkpoint)
  call checkpoint%add('line', line)
  call checkpoint%save('all.pt')
  call checkpoint%fail('the test gives it up')
  call session%latest(checkpoint)
  if (checkpoint%tag() /= 'step1') error stop 'found what was given up'
  call session%report(text)
  if (index(text, '"step1"') == 0) error stop 'does not list it'
  call session%find('step1', checkpoint)
  if (checkpoint%tag() /= 'step1') error stop 'another tag'
  call checkpoint%load('all.pt', 'cube', cube)
  call checkpoint%load('all.pt', 'wave', wave)
  if (cube(2, 1, 1) /= 2 .or. cube(1, 2, 1) /= 3 .or. cube(2, 3, 4) /= 24 .or. any(wave /= (1d0, -1d0))) error stop 'other values'
  call c_f_pointer(c_loc(line), large, [2_int64**32 + size(line)])
  call checkpoint%load('all.pt', 'line', large, status)
  if (status /= NEBULA_INVALID) error stop 'took the lower half of an extent'
  call checkpoint%load('all.pt', 'line', other, status)
  if (status /= NEBULA_INVALID) error stop 'took another type'
  print '(a)', nebula_last_message()
  call checkpoint%load('all.pt', 'none', line)
end program
