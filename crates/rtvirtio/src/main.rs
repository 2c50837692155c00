//! temporary
use rtvirtio_units::Bytes;
fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let get = |k: &str| args.iter().position(|a| a == k).map(|i| args[i + 1].clone());
    let backing = match get("--raw") {
        Some(d) => rtvirtio_bench::scratch::Backing::Raw(d.into()),
        None => rtvirtio_bench::scratch::Backing::Ssd(get("--ssd").unwrap()),
    };
    let size: u64 = get("--size-mib").unwrap().parse()?;
    rtvirtio_bench::scratch::serve(&backing, Bytes::new(size << 20), 1)
}
